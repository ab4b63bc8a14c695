"""JSON of the API as the types of `models`, and back."""

import dataclasses
import functools
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


@functools.cache
def fields_of(kind: Any) -> dict[str, tuple[str, Any]]:
    """Fields of a class by their names in JSON: name and type in Python."""
    return {name.rstrip("_"): (name, hint) for name, hint in get_type_hints(kind).items()}



def decode(kind: Any, value: Any) -> Any:
    """Makes a value of type `kind` from JSON.

    Fields that this version does not know are left out, so that a newer daemon can add fields.
    Raises `TypeError` if a field is missing.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if value is None:
        return None
    if origin in (Union, UnionType):
        parts = [part for part in arguments if part is not type(None)]
        return decode(parts[0], value) if len(parts) == 1 else value
    if origin is list:
        return [decode(arguments[0], item) for item in value]
    if origin is dict:
        return {key: decode(arguments[1], item) for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        make: Any = kind
        fields = fields_of(make)
        known = ((*fields[key], item) for key, item in value.items() if key in fields)
        return make(**{name: decode(hint, item) for name, hint, item in known})
    return value


def encode(request: Any) -> Any:
    """Makes JSON from a request. Fields that are `None` are absent: the daemon has the default."""
    if not dataclasses.is_dataclass(request):
        return request
    values = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    return {name.rstrip("_"): encode(value) for name, value in values.items() if value is not None}
