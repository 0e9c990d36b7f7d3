"""HTML and SVG as trees, so that every text and attribute is escaped on the way out."""

from typing import TypeAlias
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

Content: TypeAlias = Element | str
Number: TypeAlias = int | float


def element(tag: str, *content: Content, **attributes: str | Number) -> Element:
    """Return one element. `class_` stands for class, and `stroke_width` for stroke-width.

    Numbers are written with at most one decimal, enough for pixels.
    """
    node = Element(tag, {_name(key): _value(value) for key, value in attributes.items()})
    extend(node, *content)
    return node


def extend(node: Element, *content: Content) -> None:
    """Append text and elements to `node`, in order."""
    for part in content:
        if isinstance(part, Element):
            node.append(part)
        elif len(node):
            node[-1].tail = (node[-1].tail or "") + part
        else:
            node.text = (node.text or "") + part


def document(root: Element) -> str:
    """Return the text of a whole page."""
    return "<!doctype html>\n" + ElementTree.tostring(root, encoding="unicode", method="html") + "\n"


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _value(value: str | Number) -> str:
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")
