"""Draws docs/pipeline.svg: a pipeline schedule, in the form in which a job draws its schedule.

python docs/draw_pipeline.py     # docs/generate.py does it, too
"""

from pathlib import Path

from titanplans.parallel.pipeline.picture import as_svg
from titanplans.parallel.pipeline.timeline import timeline
from titanplans.split.stages.schedules import orders

PICTURE = Path(__file__).parent / "pipeline.svg"


def picture() -> str:
    """Return the picture."""
    return as_svg(timeline(orders("Interleaved1F1B", 4, 8, 8)), "Interleaved1F1B, 8 micro batches")


if __name__ == "__main__":
    PICTURE.write_text(picture())
