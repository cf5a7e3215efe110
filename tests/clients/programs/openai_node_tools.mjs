// openai-node: prints what `../test_agents.py` calls a report. Arguments: URLs of a model with tools and of one without,
// key, model.
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [toolsURL, schemaURL, apiKey, model] = process.argv.slice(2);
const client = (baseURL) => new OpenAI({ baseURL, apiKey, maxRetries: 0 }).chat.completions;

const Trip = z.object({
  city: z.enum(["Oslo", "Rome"]),
  days: z.number().int().min(1).max(9),
  meals: z.array(z.enum(["fish", "soup"])).max(3),
  note: z.string().max(20).nullable(),
});
const Report = z.object({ place: z.string(), rain: z.boolean(), days: z.number().int() });
const weather = zodFunction({
  name: "get_weather",
  description: "Ask for the weather.",
  parameters: z.object({ city: z.string(), days: z.number().int() }),
  function: ({ city, days }) => `${city}, ${days} days: rain`,
});
const question = { model, messages: [{ role: "user", content: "How is the weather?" }], tools: [weather] };

async function told(runner) {
  const text = await runner.finalContent();
  const answers = runner.messages.filter((message) => message.role === "assistant");
  const calls = answers.flatMap((message) => message.tool_calls ?? []);
  return { calls: calls.map((call) => JSON.parse(call.function.arguments)), text };
}

const whole = await told(client(toolsURL).runTools(question));
const streamed = await told(client(toolsURL).runTools({ ...question, stream: true }));
const reporter = client(toolsURL).runTools({
  ...question,
  messages: [{ role: "user", content: "Report the weather." }],
  response_format: zodResponseFormat(Report, "report"),
});
const report = JSON.parse(await reporter.finalContent());

const trip = {
  model,
  messages: [{ role: "user", content: "Plan a trip." }],
  response_format: zodResponseFormat(Trip, "trip"),
  temperature: 0,
};
const parsed = await client(schemaURL).parse(trip);
const final = await client(schemaURL).stream(trip).finalChatCompletion();
console.log(
  JSON.stringify({
    whole,
    streamed,
    report,
    trip: parsed.choices[0].message.parsed,
    streamed_trip: final.choices[0].message.parsed,
  }),
);
