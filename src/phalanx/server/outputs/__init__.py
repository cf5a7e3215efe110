"""What a model's text holds besides its answer: reasoning and calls of tools, taken apart while the text comes.

`output_formats.py` says which formats a model writes, `format_parser.py` takes its text apart, `output_grammars.py`
constrains it. Does not know HTTP, tokenizers or the objects of an API.
"""
