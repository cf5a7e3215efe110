"""From messages to tokens: chat template, tokenizer, memory of calls, grammars that must compile."""
