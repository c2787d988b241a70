"""Read a packed set through a DataLoader, as a training loop would, and say what came out."""

from __future__ import annotations

import time

import click


@click.command()
@click.argument("out", type=click.Path())
@click.option("--batch-size", default=64, show_default=True)
@click.option("--num-workers", type=int, help="Worker processes.  [default: the cores this process may use]")
@click.option("--image-size", default=224, show_default=True, help="Images are resized to a square of this side.")
def main(out: str, batch_size: int, num_workers: int | None, image_size: int) -> None:
    """One shuffled epoch over the packed set OUT."""
    from readers import ReaderError, ShardDataset, shard_loader
    from readers.compare.arms import SquareTensor

    try:
        dataset = ShardDataset(out, transform=SquareTensor(image_size))
    except ReaderError as error:
        raise SystemExit(f"read_set: {error}") from error
    loader = shard_loader(dataset, batch_size=batch_size, num_workers=num_workers, shuffle=True)
    started, images, shape = time.perf_counter(), 0, ()
    for batch in loader:
        pixels = batch[0] if isinstance(batch, (tuple, list)) else batch
        images += len(pixels)
        shape = tuple(pixels.shape[1:])
    seconds = time.perf_counter() - started
    click.echo(
        f"{out}: {images:,} images of {shape} in {len(loader):,} batches, {loader.num_workers} workers, "
        f"{seconds:.1f} s, {images / seconds:,.0f} images/s (start of the workers included)"
    )


if __name__ == "__main__":
    main()
