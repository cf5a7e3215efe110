// Vercel's `ai`: prints what `../test_agents.py` calls a report. Arguments: URLs of a model with tools and of one
// without, key, model, and `openai` for that provider, which asks for responses, in place of openai-compatible.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, isStepCount, Output, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [toolsURL, schemaURL, apiKey, model, provider] = process.argv.slice(2);
const served = (baseURL) =>
  provider === "openai"
    ? createOpenAI({ baseURL, apiKey })(model)
    : createOpenAICompatible({ name: "phalanx", baseURL, apiKey, supportsStructuredOutputs: true })(model);
// Without `store: false` the provider sends references to items that it takes for stored. A model that it does not know
// has no reasoning unless told so; it reads the summary, and sends reasoning back as `encrypted_content`.
const unstored = { openai: { store: false, forceReasoning: true, reasoningSummary: "auto" } };

const Trip = z.object({
  city: z.enum(["Oslo", "Rome"]),
  days: z.number().int().min(1).max(9),
  meals: z.array(z.enum(["fish", "soup"])).max(3),
  note: z.string().max(20).nullable(),
});
const Report = z.object({ place: z.string(), rain: z.boolean(), days: z.number().int() });
const get_weather = tool({
  description: "Ask for the weather.",
  inputSchema: z.object({ city: z.string(), days: z.number().int() }),
  execute: ({ city, days }) => `${city}, ${days} days: rain`,
});
const question = {
  model: served(toolsURL),
  prompt: "How is the weather?",
  tools: { get_weather },
  stopWhen: isStepCount(3),
  maxRetries: 0,
  providerOptions: unstored,
};

async function told(result) {
  const steps = await result.steps;
  return {
    calls: steps.flatMap((step) => step.toolCalls.map((call) => call.input)),
    text: await result.text,
    thought: steps.map((step) => step.reasoningText ?? "").join(""),
  };
}

const whole = await told(await generateText(question));
const stream = streamText(question);
await stream.consumeStream();
const streamed = await told(stream);
const wish = { prompt: "Report the weather.", output: Output.object({ schema: Report }) };
const { output: report } = await generateText({ ...question, ...wish });

const trip = { model: served(schemaURL), schema: Trip, prompt: "Plan a trip.", temperature: 0, maxRetries: 0 };
const object = await generateObject(trip);
const partial = streamObject(trip);
await Array.fromAsync(partial.partialObjectStream); // its object is there once the stream was read

let byDefault, refusal; // without any option of the provider
if (provider === "openai") {
  const llm_version = tool({ inputSchema: z.object({}), execute: () => "1.0" });
  const bare = { ...question, providerOptions: {} };
  byDefault = (await generateText({ ...bare, tools: { llm_version } })).text;
  refusal = await generateText(bare).catch((error) => error.message);
}
console.log(
  JSON.stringify({
    whole,
    streamed,
    report,
    trip: object.object,
    streamed_trip: await partial.object,
    by_default: byDefault,
    refusal,
  }),
);
