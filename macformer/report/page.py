"""Table 2 as one HTML file that needs no network: tables, figures, and links to the records."""

import base64
import re

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from macformer.harness import record as records
from macformer.harness.progress import duration, mebibytes
from macformer.harness.record import Record
from macformer.report import table as texts
from macformer.report.cells import Table
from macformer.report.figures import Drawn

MARKDOWN = re.compile(r"`(.+?)`|\*\*(.+?)\*\*|\*(.+?)\*")  # what the table's texts have of it
HTML = (r"<code>\1</code>", r"<strong>\2</strong>", r"<em>\3</em>")


def render(
    tables: list[Table], figures: list[list[Drawn]], lengths: Drawn, found: list[Record], problems: list[str]
) -> str:
    """`figures`: those of each table. The page stands beside runs/ and figures/. Texts from records are escaped."""
    page = Environment(loader=PackageLoader("macformer.report", ""), autoescape=True, undefined=StrictUndefined)
    page.trim_blocks = page.lstrip_blocks = True
    page.filters |= {"marked": _marked, "uri": _uri, "duration": duration, "mebibytes": mebibytes}
    used = {run.run_id: number for number, table in enumerate(tables, 1) for c in table.columns for run in c.runs}
    rows = [(run, records.path("", run.config, run.run_id).as_posix(), used.get(run.run_id)) for run in found]
    shown = list(zip(tables, figures, strict=True))
    template = page.get_template("page.html")
    return template.render(texts=texts, tables=shown, lengths=lengths, records=rows, problems=problems) + "\n"


def _marked(text: str) -> Markup:
    return Markup(MARKDOWN.sub(lambda match: match.expand(HTML[(match.lastindex or 1) - 1]), str(escape(text))))


def _uri(svg: bytes) -> str:
    """In an <img>, so that the ids of several SVGs do not meet in one document."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
