"""What the programs in Python beside this one ask for: the weather, by a tool, and objects of two classes."""

from typing import Literal

from pydantic import BaseModel, Field

QUESTION = "How is the weather?"
REPORT_WISH = "Report the weather."
WISH = "Plan a trip."
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Ask for the weather.", "parameters": PARAMETERS},
}


class Report(BaseModel):
    """How the weather is."""

    place: str
    rain: bool
    days: int


class Trip(BaseModel):
    """A trip of a few days."""

    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=9)
    meals: list[Literal["fish", "soup"]] = Field(max_length=3)
    note: str | None = Field(max_length=20)


def get_weather(city: str, days: int) -> str:
    """Ask for the weather.

    Args:
        city: name of a place
        days: how far ahead
    """
    return f"{city}, {days} days: rain"
