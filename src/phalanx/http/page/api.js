// Talks to the server this page came from. The key stays in the tab's session.

const KEY = "phalanx.key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export class Refused extends Error {}

// An answer to a request with the key. Raises Refused where the key is missing or wrong.
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  const answer = await fetch(path, { ...options, headers });
  if (answer.status === 401) throw new Refused(await reason(answer));
  return answer;
}

export async function reason(answer) {
  try {
    const body = await answer.json();
    return String(body.error?.message ?? body.error ?? `status ${answer.status}`);
  } catch {
    return `status ${answer.status}`;
  }
}

// Server-sent events of an answer, as {event, data}.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const blocks = rest.split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const found = { event: "message", data: "" };
        for (const line of block.split("\n")) {
          if (line.startsWith("event:")) found.event = line.slice(6).trim();
          else if (line.startsWith("data:")) found.data += line.slice(5).trimStart();
        }
        if (found.data) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
