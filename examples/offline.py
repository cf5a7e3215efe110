"""Answer prompts without a server, as with vLLM's offline class: two ranks on this machine share the model.

python examples/offline.py
"""

from __future__ import annotations

from phalanx import LLM, SamplingParams

QUESTIONS = ["What is phalanx?", "What is 2+2?"]


def main() -> None:
    """Continue a text, then answer questions through the model's chat template."""
    greedy = SamplingParams(temperature=0, max_tokens=40)
    with LLM("demo", tensor_parallel_size=2) as llm:
        for output in llm.generate(["phalanx serves one"], greedy):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        for question, output in zip(QUESTIONS, llm.chat(conversations, greedy), strict=True):
            print(f"{question} {output.outputs[0].text}")


if __name__ == "__main__":
    main()
