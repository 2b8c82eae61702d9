"""What the science checks of whole numbers. What comes from YAML is checked by its type before (harness/config.py)."""


def require_int(at_least: int = 1, **values: int) -> None:
    """Each of the named values must be a whole number of at least that much."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise ValueError(f"{name}={value!r} must be a whole number of at least {at_least}")
