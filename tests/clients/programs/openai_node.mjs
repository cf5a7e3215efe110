// openai-node: prints what `../test_chat_clients.py` calls a report. Arguments: base URL, key, model, prompt.
import OpenAI from "openai";

const [baseURL, apiKey, model, prompt] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: prompt }];
const asked = { model, messages, temperature: 0, max_tokens: 24 };

const chat = await client.chat.completions.create(asked);
const { message, finish_reason } = chat.choices[0];
const next = [...messages, message, { role: "user", content: "And then?" }]; // the answer as the client parsed it
const second = await client.chat.completions.create({ ...asked, messages: next });

let streamed = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({
  ...asked,
  stream: true,
  stream_options: { include_usage: true },
})) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
const runner = client.chat.completions.stream({ ...asked, stop: "." });
const final = await runner.finalChatCompletion();

const models = [];
for await (const entry of client.models.list()) models.push(entry.id);
const completion = await client.completions.create({ model, prompt, temperature: 0, max_tokens: 24 });

async function refusal(attempt) {
  try {
    await attempt();
  } catch (error) {
    const { status, message, code, param } = error;
    return { kind: error.constructor.name, status, message, code, param };
  }
  return null;
}

const stranger = new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 });
console.log(
  JSON.stringify({
    chat: { text: message.content, finish: finish_reason, tokens: chat.usage.completion_tokens },
    second: second.choices[0].message.content,
    stream: { text: streamed, tokens: usage.completion_tokens },
    helper: final.choices[0].message.content,
    models,
    completion: completion.choices[0].text,
    errors: {
      400: await refusal(() => client.chat.completions.create({ ...asked, temperature: -1 })),
      401: await refusal(() => stranger.chat.completions.create(asked)),
      404: await refusal(() => client.chat.completions.create({ ...asked, model: "gpt-unknown" })),
    },
  }),
);
