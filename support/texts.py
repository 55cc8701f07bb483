"""How text reaches a command, whatever the locale: bytes in, UTF-8.

One rule for all of it: a line ends with `\\n` or `\\r\\n`, which is read as `\\n`; nothing else
ends a line. One byte-order mark at the very start is no part of the text.
"""

import io


def as_text(content, errors='strict'):
    """The text of `content` (bytes of UTF-8); errors: as in bytes.decode."""
    return content.decode('utf-8', errors).removeprefix('\ufeff').replace('\r\n', '\n')


def argument_text(value):
    """The text of an argument of the command line, which Python has read by the locale; a byte that
    is not UTF-8 stays a surrogate, which `encode` turns back into the byte."""
    return as_text(value.encode('utf-8', 'surrogateescape'), 'surrogateescape')


def binary(stream):
    """The bytes of a text stream such as sys.stdin."""
    return stream.buffer if hasattr(stream, 'buffer') else io.BytesIO(stream.read().encode('utf-8', 'surrogateescape'))


def printable(text):
    """`text` with each byte that is not UTF-8 as the replacement character: no lone surrogate is left."""
    return text.encode('utf-8', 'surrogateescape').decode('utf-8', 'replace')
