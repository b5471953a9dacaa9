"""Text from outside, such as names of stages, so that it can steer neither a terminal nor a log."""


def plain(text: str) -> str:
    r"""Return text with every control character escaped: of lines, of colors, of direction.

    Example::

        >>> plain("a\x1b[31mb")
        'a\\x1b[31mb'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
