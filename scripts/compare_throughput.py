"""Compare loading images from their files with loading them from packed sets.

    python scripts/compare_throughput.py SOURCE OUT [OUT ...]

The same command as `shards compare`; the work is in `readers.compare`.
"""

from readers.compare.cli import main

if __name__ == "__main__":
    main()
