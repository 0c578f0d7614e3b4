"""Records and whole logs as another release would have written them: with a field that this one does not have."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import fastavro
from fastavro.schema import fingerprint as avro_fingerprint
from fastavro.schema import to_parsing_canonical_form

from infra.log import Log
from infra.memory_log import MemoryLog
from schemas.codec import HEADER_BYTES, MARKER, encode, kind, schema_text
from schemas.names import schemas_topic
from schemas.records import Record, SchemaText


def another(cls: type[Any], *, colour: str = "colour", without: str = "") -> str:
    """The schema of a release that also wrote a colour, under that name, and did not write the field `without`."""
    tree = json.loads(schema_text(cls))
    more = {"name": colour, "type": "string", "default": ""}
    tree["fields"] = [more, *(field for field in tree["fields"] if field["name"] != without)]
    return json.dumps(tree)


def mark(text: str) -> str:
    """A schema's fingerprint in hex, computed without registering it."""
    return str(avro_fingerprint(to_parsing_canonical_form(json.loads(text)), "CRC-64-AVRO"))


def written(text: str, data: bytes) -> bytes:
    """This release's bytes of a record, as the writer with that schema would have written it."""
    cls = kind(data)
    assert cls is not None
    body = io.BytesIO(data[HEADER_BYTES:])
    datum = fastavro.schemaless_reader(body, fastavro.parse_schema(json.loads(schema_text(cls))), None)
    out = io.BytesIO()
    fastavro.schemaless_writer(
        out, fastavro.parse_schema(json.loads(text)), {json.loads(text)["fields"][0]["name"]: "red", **datum}
    )
    return MARKER + bytes.fromhex(mark(text)) + out.getvalue()


def published(text: str, **changes: Any) -> SchemaText:
    """What that writer puts on `<run>.schemas`."""
    return replace(SchemaText(name=json.loads(text)["name"], fingerprint=mark(text), text=text), **changes)


def publish(log: Log, run: str, *records: Record | bytes | None, key: str = "") -> None:
    """Append to `<run>.schemas`, each under its fingerprint or the key given."""
    writer = log.writer()
    for record in records:
        name = key or (record.fingerprint if isinstance(record, SchemaText) else "00")
        value = record if isinstance(record, bytes | None) else encode(record)
        writer.send(schemas_topic(run), 0, value, name.encode())  # type: ignore[arg-type]  # None: a tombstone
    writer.flush(5.0)
    writer.close()


def rewritten(log: MemoryLog) -> list[str]:
    """Turn every record on a log into one of the other release; the schemas that it should have published."""
    texts: dict[type[Any], str] = {}
    for name in log.topics():
        for part in log._topics[name]:
            for at, envelope in enumerate(part.records):
                cls = kind(envelope.value)
                if cls is None or cls is SchemaText:
                    continue
                text = texts.setdefault(cls, another(cls))
                part.records[at] = replace(envelope, value=written(text, envelope.value or b""))
    return list(texts.values())
