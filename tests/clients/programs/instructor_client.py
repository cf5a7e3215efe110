"""instructor: prints what `../test_agents.py` calls a report. Arguments: URLs of a model with tools and of one without,
key, model.
"""

import json
import sys

import instructor
import openai
from asked import WISH, Report, Trip

tools_url, schema_url, key, model = sys.argv[1:]
asked = {"model": model, "messages": [{"role": "user", "content": WISH}], "max_retries": 0}


def client(url, mode):
    return instructor.from_openai(openai.OpenAI(base_url=url, api_key=key, max_retries=0), mode=mode)


calling = client(tools_url, instructor.Mode.TOOLS)
writing = client(schema_url, instructor.Mode.JSON_SCHEMA)
partial = list(calling.create_partial(response_model=Report, **asked))
trips = list(writing.create_partial(response_model=Trip, temperature=0, **asked))
report = {
    "report": calling.create(response_model=Report, **asked).model_dump(),
    "streamed_report": partial[-1].model_dump(),
    "trip": writing.create(response_model=Trip, temperature=0, **asked).model_dump(),
    "streamed_trip": trips[-1].model_dump(),
}
print(json.dumps(report))
