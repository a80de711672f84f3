"""Display of plans in notebooks."""

from html import escape

from slipstream.cli.drawing.svg_timeline import draw_schedule
from slipstream.planner.plan import Plan


class NotebookPlan(Plan, frozen=True, kw_only=True):
    """Plan that a notebook shows as a line of text and a picture."""

    @classmethod
    def of_plan(cls, plan: Plan) -> "NotebookPlan":
        """Return a plan with the same fields that a notebook can show."""
        return cls(**{name: getattr(plan, name) for name in plan.__struct_fields__})

    def _repr_html_(self) -> str:
        """Return the line of text, and the picture if it is small enough to draw."""
        line = f"<p>{escape(repr(self))}</p>"
        try:
            return f"{line}{draw_schedule(self.schedule).decode()}"
        except ValueError:
            return line
