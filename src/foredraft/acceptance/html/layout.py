"""Parts that every page has: its head, sections, panels of plots."""

from collections.abc import Callable, Sequence
from importlib.resources import files
from xml.etree.ElementTree import Element

from foredraft.acceptance.html import plots
from foredraft.acceptance.html.markup import Content, document, element, extend
from foredraft.acceptance.wording import NOT_MEASURED


def head(title: str) -> Element:
    """Return the head of a page that needs nothing else."""
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", files("foredraft").joinpath("data/report.css").read_text("utf-8")),
    )


def page(title: str, headline: Sequence[Element], sections: Sequence[Element]) -> str:
    """Return a page of a headline, links to its sections, and the sections."""
    links = (element("a", section[0].text or "", href=f"#{section.get('id')}") for section in sections)
    body = element(
        "body",
        element("header", *headline),
        element("nav", *links, aria_label="Sections"),
        element("main", *sections),
    )
    return document(element("html", head(title), body, lang="en"))


def section(name: str, title: str, about: str, *content: Content) -> Element:
    """Return a section with a heading and what it is about; it says so where nothing was measured."""
    made = element("section", element("h2", title), id=name)
    if about:
        extend(made, element("p", about, class_="about"))
    extend(made, *content)
    if not content:
        extend(made, plainly(NOT_MEASURED.capitalize() + "."))
    return made


def grid(panels: Sequence[Element]) -> list[Content]:
    """Return panels beside each other; nothing where there are none."""
    return [element("div", *panels, class_="panels")] if panels else []


def beside(boxes: Sequence[Element]) -> list[Content]:
    """Return boxes beside each other; nothing where there are none."""
    return [element("div", *boxes, class_="beside")] if boxes else []


def panel(title: str, draw: Callable[[plots.Paper], Element], numbers: Element | None = None) -> Element:
    """Return a plot for wide and narrow pages, with its numbers below."""
    figure = element("figure", element("figcaption", title), *plots.both_sizes(draw))
    if numbers is not None:
        extend(figure, element("details", element("summary", "The numbers"), numbers))
    return figure


def plainly(sentence: str) -> Element:
    """Return a sentence in place of something that is missing."""
    return element("p", sentence, class_="missing")
