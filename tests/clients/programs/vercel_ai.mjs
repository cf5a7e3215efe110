// Vercel's `ai` with openai-compatible: prints what `../test_chat_clients.py` calls a report. Arguments: base URL, key,
// model, prompt.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, streamText } from "ai";

const [baseURL, apiKey, model, prompt] = process.argv.slice(2);
const provider = (key) => createOpenAICompatible({ name: "phalanx", baseURL, apiKey: key, includeUsage: true });
const served = provider(apiKey);
const asked = { model: served(model), prompt, temperature: 0, maxOutputTokens: 24, maxRetries: 0 };

const chat = await generateText(asked);
const messages = [{ role: "user", content: prompt }, ...chat.response.messages, { role: "user", content: "And then?" }];
const second = await generateText({ ...asked, prompt: undefined, messages });

const stream = streamText(asked);
let streamed = "";
for await (const piece of stream.textStream) streamed += piece;
const usage = await stream.usage;
const completion = await generateText({ ...asked, model: served.completionModel(model) });

async function refusal(options) {
  try {
    await generateText({ ...asked, ...options });
  } catch (error) {
    if (!APICallError.isInstance(error)) throw error;
    const { code, param } = error.data.error;
    return { kind: error.name, status: error.statusCode, message: error.message, code, param };
  }
  return null;
}

console.log(
  JSON.stringify({
    chat: { text: chat.text, finish: chat.finishReason, tokens: chat.usage.outputTokens },
    second: second.text,
    stream: { text: streamed, tokens: usage.outputTokens },
    completion: completion.text,
    errors: {
      400: await refusal({ temperature: -1 }),
      401: await refusal({ model: provider("wrong")(model) }),
      404: await refusal({ model: served("gpt-unknown") }),
    },
  }),
);
