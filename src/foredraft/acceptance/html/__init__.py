"""The report as one self-contained page that opens offline."""

from foredraft.acceptance.html.page import render

__all__ = ["render"]
