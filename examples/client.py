"""Talk to a phalanx server with the `openai` package: a streamed answer, what it cost, and a request that is refused.

phalanx serve demo                                  # in another terminal
python examples/client.py [http://127.0.0.1:8000/v1]
"""

from __future__ import annotations

import os
import sys

import openai

QUESTION = "What is phalanx?"


def main() -> None:
    """Ask one question, then one that the server must refuse."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    key = os.environ.get("OPENAI_API_KEY", "none")  # it counts only if the server has an --api-key
    client = openai.OpenAI(base_url=url, api_key=key)
    model = client.models.list().data[0].id
    stream_answer(client, model)
    show_refusal(client, model)


def stream_answer(client: openai.OpenAI, model: str) -> None:
    """Print an answer while it is computed, then its token counts."""
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    print(f"{model}: ", end="")
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage:  # the last chunk has no choices
            print(
                f"\n({chunk.usage.prompt_tokens} tokens in the prompt, {chunk.usage.completion_tokens} in the answer)"
            )


def show_refusal(client: openai.OpenAI, model: str) -> None:
    """A field that the server cannot honour is an error that names it; nothing is ignored."""
    try:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hi"}], temperature=-1)
    except openai.BadRequestError as error:
        print(f"As it should be, a temperature of -1 was refused ({error.status_code}): {error.body['message']}")


if __name__ == "__main__":
    try:
        main()
    except openai.AuthenticationError as error:
        sys.exit(f"{error.body['message']} Set OPENAI_API_KEY to one of the server's keys.")
    except openai.NotFoundError:
        sys.exit("There is no such API at this address. It ends in /v1, as http://127.0.0.1:8000/v1.")
    except openai.APIConnectionError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error.__cause__):
            sys.exit("The certificate is not trusted. Set SSL_CERT_FILE to the server's --ssl-certfile.")
        sys.exit(f"No server answers there ({error.__cause__}). Start one with: phalanx serve demo")
