"""From messages to tokens: chat template, earlier answers in their own tokens, tokenizer, grammars to be compiled."""
