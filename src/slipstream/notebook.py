"""A plan as a notebook shows it."""

from html import escape

from slipstream.cli.drawing.svg_timeline import drawing
from slipstream.planner.plan import Plan


class NotebookPlan(Plan, frozen=True, kw_only=True):
    """A plan that a notebook shows as a line and the picture of its schedule."""

    @classmethod
    def of_plan(cls, plan: Plan) -> "NotebookPlan":
        """Return the same plan, shown so."""
        return cls(**{name: getattr(plan, name) for name in plan.__struct_fields__})

    def _repr_html_(self) -> str:
        """The line, and the picture where it is not too large to be drawn."""
        line = f"<p>{escape(repr(self))}</p>"
        try:
            return f"{line}{drawing(self.schedule).decode()}"
        except ValueError:
            return line
