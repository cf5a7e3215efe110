// openai-node: Responses: prints what `../test_agents.py` calls a report. Arguments: URLs of a model with tools and of
// one without, key, model.
import OpenAI from "openai";
import { zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [toolsURL, schemaURL, apiKey, model] = process.argv.slice(2);
const responses = (baseURL) => new OpenAI({ baseURL, apiKey, maxRetries: 0 }).responses;

const Trip = z.object({
  city: z.enum(["Oslo", "Rome"]),
  days: z.number().int().min(1).max(9),
  meals: z.array(z.enum(["fish", "soup"])).max(3),
  note: z.string().max(20).nullable(),
});
const Report = z.object({ place: z.string(), rain: z.boolean(), days: z.number().int() });
const weather = zodResponsesFunction({
  name: "get_weather",
  description: "Ask for the weather.",
  parameters: z.object({ city: z.string(), days: z.number().int() }),
});
const tools = [weather];

const create = (body) => responses(toolsURL).create(body);
const parse = (body) => responses(toolsURL).parse(body);
const stream = (body) => responses(toolsURL).stream(body).finalResponse();

// Asks until there are no more calls; `ask` is one of the three above.
async function loop(ask, question, options = {}) {
  const input = [{ role: "user", content: question }];
  const calls = [];
  let thought = "";
  for (;;) {
    const response = await ask({ model, input, tools, ...options });
    const called = response.output.filter((item) => item.type === "function_call");
    const reasoning = response.output.filter((item) => item.type === "reasoning");
    thought += reasoning.flatMap((item) => item.content.map((part) => part.text)).join("");
    if (called.length === 0) return { calls, text: response.output_text, thought, response };
    input.push(...response.output.map(({ parsed_arguments, ...item }) => item)); // the answer as the client parsed it
    for (const { call_id, arguments: given } of called) {
      const { city, days } = JSON.parse(given);
      calls.push({ city, days });
      input.push({ type: "function_call_output", call_id, output: `${city}, ${days} days: rain` });
    }
  }
}

async function told(ask) {
  const { calls, text, thought } = await loop(ask, "How is the weather?");
  return { calls, text, thought };
}

const reporting = { text: { format: zodTextFormat(Report, "report") } };
const reported = await loop(parse, "Report the weather.", reporting);
const streamedReport = await loop(stream, "Report the weather.", reporting);

const trip = { model, input: "Plan a trip.", text: { format: zodTextFormat(Trip, "trip") }, temperature: 0 };
const parsed = await responses(schemaURL).parse(trip);
const final = await responses(schemaURL).stream(trip).finalResponse();
console.log(
  JSON.stringify({
    whole: await told(create),
    streamed: await told(stream),
    report: reported.response.output_parsed,
    streamed_report: streamedReport.response.output_parsed,
    trip: parsed.output_parsed,
    streamed_trip: final.output_parsed,
  }),
);
