"""Dictionaries with attribute access."""

__all__ = ["AttributeDict"]


class AttributeDict(dict):
    """`d.name` and `d["name"]` are the same."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no field {name!r}; there are {', '.join(self)}") from None

    def __setattr__(self, name, value):
        self[name] = value

    def __delattr__(self, name):
        try:
            del self[name]
        except KeyError:
            raise AttributeError(name) from None

    def copy(self):
        return AttributeDict(self)

    def to_dict(self):
        """A plain dictionary, of plain dictionaries."""
        return {name: _plain(value) for name, value in self.items()}


def _plain(value):
    if isinstance(value, AttributeDict):
        return value.to_dict()
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value
