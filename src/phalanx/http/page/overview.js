// The one stream of what the server does: a snapshot, then changes. Connects again by itself.

import { Refused, ask, events, reason } from "./api.js";

const PAUSES_MS = [500, 1000, 2000, 4000];
const SILENT_MS = 25000; // the server says at least every ten seconds that it goes on

export const parts = new Map();

// Parts below "requests/", say, newest first.
export function below(name) {
  return [...parts].filter(([part]) => part.startsWith(`${name}/`)).map(([part, value]) => [part.slice(name.length + 1), value]);
}

export async function watch({ changed, lost, refused }) {
  let failures = 0;
  for (;;) {
    const silence = new AbortController();
    let timer;
    let told = "no connection";
    const heard = () => { clearTimeout(timer); timer = setTimeout(() => silence.abort(), SILENT_MS); };
    try {
      heard();
      const answer = await ask("v1/overview/events", { signal: silence.signal, cache: "no-store" });
      if (!answer.ok) {
        told = await reason(answer);
        throw new Error(told);
      }
      for await (const { event, data } of events(noting(answer, heard))) {
        const said = JSON.parse(data);
        if (event === "snapshot") {
          parts.clear();
          for (const [name, value] of Object.entries(said)) parts.set(name, value);
        } else {
          for (const name of said.drop) parts.delete(name);
          for (const [name, value] of Object.entries(said.set)) parts.set(name, value);
        }
        failures = 0;
        try { changed(); } catch (error) { reportError(error); } // a fault of the page ends no stream
      }
    } catch (error) {
      if (error instanceof Refused) {
        await refused(error.message);
        continue;
      }
    } finally {
      clearTimeout(timer);
    }
    lost(told);
    await new Promise((resolve) => setTimeout(resolve, PAUSES_MS[Math.min(failures, PAUSES_MS.length - 1)]));
    failures += 1;
  }
}

// The answer, whose every byte is heard, comments included.
function noting(answer, heard) {
  const through = new TransformStream({ transform(piece, out) { heard(); out.enqueue(piece); } });
  return { body: answer.body.pipeThrough(through) };
}
