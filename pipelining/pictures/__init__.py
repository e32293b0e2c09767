"""Timelines as files: SVG, an interactive HTML page, a trace for Perfetto.

In come timelines, planned, simulated or measured; out goes text to be written to a file. This file
only re-exports. Not here: the picture for the terminal (pipelining/drawing.py).
"""

from stagewright.pipelining.pictures.html import to_html as to_html
from stagewright.pipelining.pictures.perfetto import to_perfetto as to_perfetto
from stagewright.pipelining.pictures.svg import to_svg as to_svg
