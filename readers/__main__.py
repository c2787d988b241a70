"""``python -m readers``: the ``shards`` command under a name that nothing else has."""

from .cli import main

if __name__ == "__main__":
    main()
