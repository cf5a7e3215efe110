"""A hundred JSON schemas in the styles of real APIs, each with the question that a client would ask beside it.

They have what clients send: pydantic's and zod's titles, `$defs` and nulls, OpenAPI's formats, enums, bounds, patterns,
optional fields, unions told apart by a constant, recursion. `SCHEMAS` has them by name; `COVERING` are the ones of
`make test-full`, which together have every keyword.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
STR: Schema = {"type": "string"}
INT: Schema = {"type": "integer"}
NUM: Schema = {"type": "number"}
BOOL: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}


def obj(required: str | None = None, /, **properties: Any) -> Schema:
    """An object without other properties; all of them are required unless `required` names some."""
    names = [*properties] if required is None else required.split()
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def loose(required: str, /, **properties: Any) -> Schema:
    """An object as pydantic writes it: it says nothing about other properties."""
    titled = {name: {"title": name.replace("_", " ").title(), **value} for name, value in properties.items()}
    return {"type": "object", "title": "Model", "properties": titled, "required": required.split()}


def text(most: int | None = None, **more: Any) -> Schema:
    return {"type": "string", **more} if most is None else {"type": "string", "maxLength": most, **more}


def words(*values: Any) -> Schema:
    return {"type": "string", "enum": [*values]}


def listed(items: Schema, most: int | None = 3, least: int = 0) -> Schema:
    bounds = {} if most is None else {"maxItems": most}
    return {"type": "array", "items": items, "minItems": least, **bounds}


def between(low: float, high: float, kind: str = "integer") -> Schema:
    return {"type": kind, "minimum": low, "maximum": high}


def form(name: str) -> Schema:
    return {"type": "string", "format": name}


def like(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


def maybe(schema: Schema) -> Schema:
    """pydantic's optional field."""
    return {"anyOf": [schema, NULL], "default": None}


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def const(value: Any) -> Schema:
    return {"const": value}


MONEY = obj(
    amount={"type": "number", "minimum": 0, "maximum": 100000, "multipleOf": 0.01}, currency=words("EUR", "USD", "GBP")
)
ADDRESS = obj(street=text(60), city=text(20), zip=like(r"^\d{5}$"), country=like("^[A-Z]{2}$"))
PERSON = obj(name=text(), age=between(0, 120))
POINT = obj(lat=between(-90, 90, "number"), lon=between(-180, 180, "number"))

# fmt: off
ASKED: list[tuple[str, str, Schema]] = [
    # -- what clients' libraries write for a class -------------------------------------------------------------------
    ("pydantic person", "Extract: John is 30 years old.", loose("name age", name=STR, age=INT)),
    ("openai strict person", "Extract: Ann is 41.", {**loose("name age", name=STR, age=INT),
     "additionalProperties": False}),
    ("zod person", "Extract: Bob, 25.", {"$schema": "http://json-schema.org/draft-07/schema#", **obj(name=STR,
     age=NUM)}),
    ("zod safe integer", "How old is Eve (19)?", obj(name=STR, age=between(-9007199254740991, 9007199254740991))),
    ("pydantic optional", "Extract: Kim, no e-mail.", loose("name", name=text(20), email=maybe(text()),
     age=maybe(INT))),
    ("pydantic enum", "Which colour is the sky?", {"$defs": {"Color": {"enum": ["red", "green", "blue"],
     "title": "Color", "type": "string"}}, **loose("color", color=ref("Color"))}),
    ("pydantic nested", "Where does Max live?", {"$defs": {"Address": ADDRESS}, **loose("name address",
     name=text(20), address=ref("Address"))}),
    ("pydantic list", "List two fruits.", {"$defs": {"Fruit": loose("name", name=text(20))}, **loose("fruits",
     fruits=listed(ref("Fruit"), 2, 2))}),
    ("pydantic literal", "Is it true?", loose("kind value", kind={"const": "answer", "type": "string",
     "default": "answer"}, value=BOOL)),
    ("pydantic allOf of one", "Who wrote it?", {"$defs": {"Person": PERSON}, **loose("author",
     author={"allOf": [ref("Person")], "description": "the author"})}),
    ("pydantic tuple", "Give a point.", loose("point", point={"type": "array", "prefixItems": [between(0, 9),
     between(0, 9)], "minItems": 2, "maxItems": 2})),
    ("pydantic dict", "Count the letters of 'ab'.", loose("counts", counts={"type": "object",
     "additionalProperties": between(0, 9), "maxProperties": 2})),
    ("pydantic union", "A number or a word?", loose("value", value={"anyOf": [between(0, 99), text(10)]})),
    ("draft-07 definitions", "Name a city.", {"definitions": {"City": obj(name=text(20))},
     **obj(city={"$ref": "#/definitions/City"})}),
    ("reference by pointer", "Two prices.", obj(first=MONEY, second={"$ref": "#/properties/first"})),
    # -- weather, places, travel -------------------------------------------------------------------------------------
    ("weather", "What is the weather in Paris?", obj(city=text(20), temperature=between(-50, 60),
     unit=words("celsius", "fahrenheit"))),
    ("weather arguments", "Call get_weather for Rome.", obj("location", location={**text(),
     "description": "City and country, e.g. Rome, Italy"}, unit=words("c", "f"))),
    ("forecast", "Forecast for three days.", obj(days=listed(obj(date=form("date"), high=between(-50, 60),
     low=between(-50, 60), sky=words("sun", "clouds", "rain", "snow")), 3, 3))),
    ("coordinates", "Where is Berlin?", obj(place=text(20), position=POINT)),
    ("geojson", "A line of two points.", obj(type=const("LineString"), coordinates=listed(listed(between(-180, 180),
     2, 2), 2, 2))),
    ("flight", "Book a flight to Oslo.", obj(from_=like("^[A-Z]{3}$"), to=like("^[A-Z]{3}$"), date=form("date"),
     seat=words("economy", "business"), bags=between(0, 3))),
    ("hotel", "Book a room.", obj("check_in nights", check_in=form("date"), nights=between(1, 14), guests=between(1,
     4), breakfast=BOOL)),
    ("itinerary", "Plan a weekend.", obj(stops=listed(obj(city=text(20), arrive=form("date-time"),
     transport=words("train", "car", "plane")), 2, 1))),
    ("time zone", "Time in Tokyo?", obj(zone=like("^[A-Z][a-z]{2,10}/[A-Z][a-z]{2,10}$"), time=form("time"),
     offset=between(-12, 14))),
    ("address", "Write an address.", ADDRESS),
    # -- shops, money ------------------------------------------------------------------------------------------------
    ("invoice", "Make an invoice.", obj(number=like(r"^INV-\d{4}$"), issued=form("date"),
     lines=listed(obj(text=text(100), quantity=between(1, 99), price=MONEY), 2, 1), total=MONEY)),
    ("product", "Describe a lamp.", obj("id name", id=form("uuid"), name=text(), price=MONEY,
     tags=listed(text(12)), stock=between(0, 1000))),
    ("order", "Order two books.", obj(order_id=between(1, 99999), items=listed(obj(sku=like("^[A-Z]{2}[0-9]{4}$"),
     quantity=between(1, 9)), 3, 1), express=BOOL)),
    ("payment card", "Pay by card.", obj(type=const("card"), number=like(r"^\d{4} \d{4} \d{4} \d{4}$"),
     expires=like(r"^(0[1-9]|1[0-2])/\d{2}$"))),
    ("payment methods", "How do you pay?", {"oneOf": [obj(type=const("card"), last4=like(r"^\d{4}$")),
     obj(type=const("cash"), amount=between(1, 500)), obj(type=const("iban"), iban=like(r"^DE\d{20}$"))]}),
    ("exchange rate", "Rate of EUR to USD?", obj(base=words("EUR"), quote=words("USD"), rate={"type": "number",
     "exclusiveMinimum": 0, "maximum": 10})),
    ("price steps", "A price in steps of five.", obj(price={"type": "integer", "minimum": 0, "maximum": 100,
     "multipleOf": 5})),
    ("discount", "Ten percent off.", obj(percent=between(0, 100), code=like("^[A-Z0-9]{6}$"),
     valid_until=maybe(form("date")))),
    ("review", "Review a phone.", obj(stars=between(1, 5), title=text(100), pros=listed(text(20), 2),
     cons=listed(text(20), 2))),
    ("cart", "Show the cart.", obj(items=listed(obj(name=text(20), quantity=between(1, 9), unit_price=between(0, 999,
     "number")), 3), empty=BOOL)),
    ("shipping", "Where is the parcel?", obj(status=words("packed", "shipped", "delivered"), carrier=text(15),
     eta=maybe(form("date")), tracking=like("^[0-9]{10}$"))),
    ("bank transfer", "Send 10 euros.", obj(to=obj(name=text(20), iban=like("^[A-Z]{2}[0-9]{10}$")), amount=MONEY,
     reference=text(100))),
    ("salary range", "Salary of a cook?", obj(minimum=between(0, 200000), maximum=between(0, 200000),
     currency=words("EUR", "USD"))),
    # -- tickets, mail, calendar -------------------------------------------------------------------------------------
    ("ticket", "The app crashes at login.", obj(title=text(), priority=words("low", "medium", "high", "critical"),
     labels=listed(words("bug", "crash", "login", "ui")), assignee=maybe(text(15)))),
    ("triage", "Classify: I cannot pay.", obj(category=words("billing", "technical", "account", "other"),
     urgent=BOOL, confidence=between(0, 1, "number"))),
    ("mail", "Write a short mail.", obj(to=listed(form("email"), 2, 1), subject=text(100), body=text(200))),
    ("contact", "Extract the contact.", obj("name email", name=text(20), email=form("email"),
     phone=like(r"^\+[0-9]{8,12}$"))),
    ("event", "Meeting tomorrow at ten.", obj(title=text(100), start=form("date-time"), end=form("date-time"),
     attendees=listed(form("email"), 2), recurring=BOOL)),
    ("reminder", "Remind me.", obj(text=text(100), at=form("time"), repeat={"enum": ["daily", "weekly", None]})),
    ("duration", "How long is a film?", obj(title=text(20), length=form("duration"))),
    ("chat message", "Greet somebody.", obj(role=words("user", "assistant"), content=text(160))),
    ("conversation", "Two turns.", obj(messages=listed(obj(role=words("user", "assistant"), content=text(160)), 2,
     2))),
    ("poll", "Make a poll.", obj(question=text(), options=listed(text(15), 4, 2), multiple=BOOL)),
    ("survey answer", "How satisfied are you?", obj(score=between(0, 10), comment=maybe(text(100)))),
    ("incident", "The database is down.", obj(id=like(r"^INC\d{6}$"), severity=between(1, 4),
     services=listed(words("api", "db", "web"), 3, 1), started=form("date-time"), resolved=BOOL)),
    # -- agents and their tools --------------------------------------------------------------------------------------
    ("search arguments", "Search for cats.", obj("query", query=text(), limit=between(1, 50), safe=BOOL)),
    ("calculator", "What is 2 + 3?", obj(op=words("add", "sub", "mul", "div"), a=NUM, b=NUM)),
    ("read file", "Read the notes.", obj("path", path=like(r"^/[a-z]{1,12}(/[a-z]{1,12}){0,3}$"), offset=between(0,
     1000), limit=between(1, 2000))),
    ("edit file", "Replace a word.", obj(path=text(100), old=text(100), new=text(100), all={**BOOL, "default": False})),
    ("shell command", "List files.", obj("command", command=text(), timeout=between(1, 600), background=BOOL)),
    ("database query", "Count users.", obj(table=words("users", "orders"), columns=listed(like("^[a-z_]{1,12}$"), 3,
     1), limit=between(1, 100))),
    ("filter", "Users over 18.", obj(field=words("age", "name"), op=words("=", "<", ">", "!="),
     value={"type": ["integer", "string"], "maxLength": 10, "minimum": 0, "maximum": 200})),
    ("plan", "Plan a cake.", obj(goal=text(100), steps=listed(obj(id=between(1, 9), action=text(100), done=BOOL), 3,
     1))),
    ("next action", "What next?", {"anyOf": [obj(action=const("search"), query=text(160)), obj(action=const("answer"),
     text=text(160))]}),
    ("agent thought", "Think, then act.", obj(thought=text(), action=words("search", "calculate", "finish"),
     input=text())),
    ("function call", "Call f.", obj(name=like("^[a-z_][a-z0-9_]{0,15}$"), arguments={"type": "object",
     "additionalProperties": text(10), "maxProperties": 2})),
    ("router", "Which agent?", obj(agent=words("coder", "writer", "critic"), reason=text())),
    ("judge", "Judge the answer.", obj(verdict=words("pass", "fail"), score=between(0, 100), reasons=listed(text(100),
     2, 1))),
    ("memory", "Remember this.", obj(key=like("^[a-z]{1,10}$"), value=text(), ttl=maybe(between(1, 3600)))),
    ("browser action", "Click the button.", {"oneOf": [obj(kind=const("click"), x=between(0, 1920), y=between(0,
     1080)), obj(kind=const("type"), text=text(20)), obj(kind=const("scroll"), by=between(-500, 500))]}),
    ("code review", "Review the change.", obj(comments=listed(obj(line=between(1, 500), severity=words("nit", "bug"),
     text=text(120)), 2), approve=BOOL)),
    # -- extraction and classification -------------------------------------------------------------------------------
    ("sentiment", "I love it.", obj(sentiment=words("positive", "negative", "neutral"))),
    ("bare enum", "Yes or no?", words("yes", "no", "maybe")),
    ("bare boolean", "Is water wet?", BOOL),
    ("bare integer", "How many legs has a dog?", between(0, 10)),
    ("bare list", "Name three primes.", listed(between(2, 100), 3, 3)),
    ("bare constant", "Say it.", const({"ok": True, "code": [1, "a", None]})),
    ("mixed enum", "Pick one.", {"enum": [1, "one", True, None, 2.5]}),
    ("entities", "Anna met Bob in Rome.", obj(entities=listed(obj(text=text(15), label=words("PERSON", "PLACE",
     "DATE")), 3, 1))),
    ("relations", "Anna knows Bob.", obj(triples=listed({"type": "array", "prefixItems": [text(10), words("knows",
     "likes"), text(10)], "items": False, "minItems": 3}, 2, 1))),
    ("summary", "Summarise the tale.", obj(title=text(100), summary=text(300), keywords=listed(text(12), 4, 1))),
    ("translation", "Translate 'good morning'.", obj(source=like("^[a-z]{2}$"), target=like("^[a-z]{2}$"),
     text=text(100))),
    ("language", "Which language?", obj(code=like("^[a-z]{2}(-[A-Z]{2})?$"), probability=between(0, 1, "number"))),
    ("quiz", "Make a quiz.", obj(question=text(), choices=listed(text(20), 4, 4), answer=between(0, 3))),
    ("recipe", "A recipe of pancakes.", obj(name=text(20), serves=between(1, 8),
     ingredients=listed(obj(name=text(15), amount=NUM, unit=words("g", "ml", "piece")), 4, 1), minutes=between(1,
     240))),
    ("book", "Describe a book.", obj("title author", title=text(), author=text(20), year=between(1500, 2030),
     isbn=like(r"^97[89]-\d{10}$"))),
    ("résumé", "Extract the résumé.", obj(name=text(20), skills=listed(text(12), 4, 1),
     jobs=listed(obj(company=text(15), from_year=between(1980, 2030), to_year=maybe(between(1980, 2030))), 2))),
    ("medical", "Note the visit.", obj(patient_id=between(1, 9999), symptoms=listed(text(20), 3, 1),
     temperature={"type": "number", "minimum": 35, "maximum": 42}, urgent=BOOL)),
    ("unicode", "Name the emoji.", obj(**{"größe": between(1, 9), "名前": words("東京", "naïve café", "🙂"),
     "a b\"c": BOOL})),
    ("sport", "Who won?", obj(home=text(15), away=text(15), score={"type": "array", "prefixItems": [between(0, 9),
     between(0, 9)], "items": False, "minItems": 2})),
    # -- systems -----------------------------------------------------------------------------------------------------
    ("server config", "Configure the server.", obj("host port", host=form("hostname"), port=between(1, 65535),
     tls=BOOL, workers=between(1, 64))),
    ("network", "An address of each kind.", obj(v4=form("ipv4"), v6=form("ipv6"))),
    ("link", "A link.", obj(url=like(r"^https://[a-z]{1,10}\.(com|org)/[a-z]{0,10}$"), title=text(20))),
    ("log entry", "Log a start.", obj(level=words("DEBUG", "INFO", "WARN", "ERROR"), time=form("date-time"),
     message=text(100), code=maybe(between(100, 599)))),
    ("metrics", "Report the load.", obj(cpu=between(0, 100, "number"), memory=between(0, 100, "number"),
     disks={"type": "object", "patternProperties": {"^sd[a-z]$": between(0, 100)}, "additionalProperties": False})),
    ("version", "Which version?", obj(version=like(r"^\d{1,2}\.\d{1,2}\.\d{1,2}$"), stable=BOOL)),
    ("semantic diff", "What changed?", obj(added=listed(text(12)), removed=listed(text(12)), breaking=BOOL)),
    ("colour", "A colour.", obj(hex=like("^#[0-9a-f]{6}$"), rgb=listed(between(0, 255), 3, 3), alpha=between(0, 1,
     "number"))),
    ("chessboard", "A corner of the board.", obj(rows=listed(listed(words("", "K", "Q", "p"), 3, 3), 3, 3))),
    ("deeply nested", "Go down.", obj(a=obj(b=obj(c=obj(d=obj(e=obj(value=BOOL))))))),
    ("many fields", "Fill the form.", obj(**{f"field_{i}": words("yes", "no") for i in range(24)})),
    ("many optional fields", "Fill what you know.", obj("field_0", **{f"field_{i}": between(0,
     9) for i in range(20)})),
    # -- recursion, and objects of several parts ---------------------------------------------------------------------
    ("tree", "A small tree.", {"$defs": {"Node": obj(value=between(0, 9), children=listed(ref("Node"), 2))},
     **ref("Node")}),
    ("linked list", "A list of two.", {"$defs": {"Cell": obj(value=between(0, 9), next={"anyOf": [ref("Cell"),
     NULL]})}, **obj(head=ref("Cell"))}),
    ("two parts", "A person with a job.", {"allOf": [obj(name=text(20), job=text(20)), {"type": "object",
     "required": ["name"]}]}),
]
# fmt: on
COVERING = (
    "pydantic nested",
    "zod safe integer",
    "forecast",
    "payment methods",
    "metrics",
    "unicode",
    "tree",
    "many optional fields",
)
SCHEMAS: dict[str, tuple[str, Schema]] = {name: (asked, schema) for name, asked, schema in ASKED}
