"""Values of Spark as JSON, as Spark's own `to_json` writes them: `from_json` with the same schema reads them back.

Structs and maps are objects, decimals are numbers, bytes are base64, times are ISO 8601 texts. It differs from
`to_json` in three places: fields that are null are written (`to_json` leaves them out unless `ignoreNullFields` is
false), a time keeps its microseconds, and the option `nan` decides what becomes of NaN and infinity (`to_json` writes
them as text).
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final, Literal

import msgspec
import numpy as np
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    GeographyType,
    GeometryType,
    MapType,
    StringType,
    StructType,
    UserDefinedType,
    VariantType,
    YearMonthIntervalType,
)
from pyspark.sql.variant_utils import VariantUtils

from waypost.errors import InvalidInput

NanRule = Literal["fail", "null", "string"]
#: Changes a value as Arrow gives it into one that JSON has. None in place of a converter: it is one already.
Converter = Callable[[Any], Any]

_MICROSECONDS: Final = 1_000_000
_DAY_TIME_UNITS: Final = ("DAY", "HOUR", "MINUTE", "SECOND")
#: How many microseconds the units of `_DAY_TIME_UNITS` have.
_DAY_TIME_SIZES: Final = (86_400 * _MICROSECONDS, 3_600 * _MICROSECONDS, 60 * _MICROSECONDS, _MICROSECONDS)


def check_body_type(kind: DataType, place: str = "body") -> None:
    """Refuse a type that cannot be published, wherever it is in the body."""
    if isinstance(kind, UserDefinedType):
        check_body_type(kind.sqlType(), place)
    elif isinstance(kind, StructType):
        names = kind.fieldNames()
        for name in names:
            if names.count(name) > 1:
                raise InvalidInput(f"{place} has more than one field {name}: name each of them differently")
        for field in kind.fields:
            check_body_type(field.dataType, f"{place}.{field.name}")
    elif isinstance(kind, ArrayType):
        check_body_type(kind.elementType, f"{place}[]")
    elif isinstance(kind, MapType):
        check_body_type(kind.keyType, f"a key of {place}")
        check_body_type(kind.valueType, f"{place}[]")
    elif isinstance(kind, GeometryType | GeographyType | YearMonthIntervalType):
        raise InvalidInput(
            f"{place} is {kind.simpleString()}, which cannot be published: cast it to a string, or publish "
            'to_json(body) with option("bodyFormat", "json")'
        )


def make_converter(kind: DataType, nan: NanRule) -> Converter | None:
    """Return the converter of the values of a type, None where they are JSON values already."""
    if isinstance(kind, UserDefinedType):
        return make_converter(kind.sqlType(), nan)
    if isinstance(kind, StructType):
        return _struct_converter(kind, nan)
    if isinstance(kind, ArrayType):
        element = make_converter(kind.elementType, nan)
        return None if element is None else lambda values: [None if one is None else element(one) for one in values]
    if isinstance(kind, MapType):
        return _map_converter(kind, nan)
    if isinstance(kind, DecimalType):
        return _decimal
    if isinstance(kind, DoubleType | FloatType):
        return _float_converter(isinstance(kind, FloatType), nan)
    if isinstance(kind, DayTimeIntervalType):
        first, last = kind.startField, kind.endField
        return lambda value: format_day_time(value, first, last)
    if isinstance(kind, VariantType):
        return _variant
    return None


def _struct_converter(kind: StructType, nan: NanRule) -> Converter | None:
    made = [(field.name, make_converter(field.dataType, nan)) for field in kind.fields]
    parts = [(name, converter) for name, converter in made if converter is not None]
    if not parts:
        return None

    def convert(value: dict[str, Any]) -> dict[str, Any]:
        for name, converter in parts:
            if value[name] is not None:
                value[name] = converter(value[name])
        return value

    return convert


def _map_converter(kind: MapType, nan: NanRule) -> Converter:
    key = _key_converter(kind.keyType)
    value = make_converter(kind.valueType, nan)

    def convert(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        keyed = pairs if key is None else [(key(one), other) for one, other in pairs]
        if value is None:
            return dict(keyed)
        return {one: None if other is None else value(other) for one, other in keyed}

    return convert


def _key_converter(kind: DataType) -> Converter | None:
    """Return what makes a text of the key of a map, as Spark makes one of a value."""
    if isinstance(kind, StringType):
        return None
    if isinstance(kind, BooleanType):
        return lambda key: "true" if key else "false"
    if isinstance(kind, BinaryType):
        return lambda key: base64.b64encode(key).decode()
    if isinstance(kind, FloatType):
        return lambda key: _java_float(np.float32(key))
    if isinstance(kind, DoubleType):
        return _java_float
    converter = make_converter(kind, "string")
    return lambda key: _text(key if converter is None else converter(key))


def _text(key: object) -> str:
    if isinstance(key, msgspec.Raw):
        return bytes(key).decode()
    if isinstance(key, datetime | date | time):
        return str(msgspec.to_builtins(key))
    if isinstance(key, dict | list):
        return msgspec.json.encode(key).decode()
    return str(key)


def _java_float(value: Any) -> str:
    """Return a number as text, infinity by Java's name."""
    return str(value) if math.isfinite(value) else non_finite(float(value))


def non_finite(value: float) -> str:
    """Return the text that Spark writes and reads for a number that JSON does not have."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _decimal(value: Decimal) -> msgspec.Raw:
    # A number with all of its digits: as a float it would lose those after the 17th.
    return msgspec.Raw(str(value).encode())


def _float_converter(is_short: bool, nan: NanRule) -> Converter | None:
    def shortest(value: float) -> float:
        # A 32-bit 0.1 is 0.10000000149011612 with 64 bits: its own shortest form is what was meant.
        return float(str(np.float32(value)))

    def convert(value: float) -> Any:
        if not math.isfinite(value):
            return None if nan == "null" else non_finite(value)
        return shortest(value) if is_short else value

    if nan != "fail":
        return convert
    return shortest if is_short else None


def _variant(value: dict[str, bytes]) -> msgspec.Raw:
    return msgspec.Raw(VariantUtils.to_json(value["value"], value["metadata"]).encode())


def format_day_time(value: timedelta, first: int, last: int) -> str:
    """Return a day-time interval as Spark writes and reads it: `INTERVAL '1 02:03:04.5' DAY TO SECOND`."""
    left = value // timedelta(microseconds=1)
    sign, left = ("-" if left < 0 else ""), abs(left)
    text = ""
    for unit in range(first, last + 1):
        count, left = divmod(left, _DAY_TIME_SIZES[unit])
        separator = "" if unit == first else " " if unit == 1 else ":"
        text += separator + (str(count) if unit == first else f"{count:02}")
    if last == 3 and left:
        text += f".{left:06}".rstrip("0")
    units = _DAY_TIME_UNITS[first] if first == last else f"{_DAY_TIME_UNITS[first]} TO {_DAY_TIME_UNITS[last]}"
    return f"INTERVAL '{sign}{text}' {units}"


def find_non_finite(value: Any, place: str = "body") -> str | None:
    """Return where in a body the first NaN or infinity is, None if there is none."""
    if isinstance(value, float):
        return None if math.isfinite(value) else place
    parts: Iterator[tuple[Any, str]] = iter(())
    if isinstance(value, dict):
        parts = ((part, f"{place}.{name}") for name, part in value.items())
    elif isinstance(value, list):
        parts = ((part, f"{place}[{index}]") for index, part in enumerate(value))
    for part, name in parts:
        found = find_non_finite(part, name)
        if found is not None:
            return found
    return None
