"""Parses reasoning and tool calls in a model's text, while the text comes.

`output_formats.py` finds the formats that a model writes, `format_parser.py` parses its text, `output_grammars.py`
constrains it.
"""
