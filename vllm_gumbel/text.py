"""How values that somebody else chose are shown in messages."""


def shorten(value: object, limit: int = 80) -> str:
    """Return `repr(value)`, cut to `limit` characters, since a client may send anything."""
    try:
        text = repr(value)
    except ValueError:  # an integer too long for Python to print
        return f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
