"""Reads in the background what is needed next."""

from concurrent.futures import ThreadPoolExecutor


def read_ahead(read, numbers):
    """Yields read(n) for each of `numbers`, in order, made by a thread that is one ahead. What `read` raises is raised here, at
    the number it belongs to; the thread ends with the generator, which closes early by `close()`."""
    with ThreadPoolExecutor(1) as reader:
        following = None
        for n in numbers:
            current, following = following, reader.submit(read, n)
            if current is not None:
                yield current.result()
        if following is not None:
            yield following.result()
