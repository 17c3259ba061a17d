"""What a plan and its graphs cost, and what passes did to them: tables, and one page."""

from zgraph.explain.explanation import Explanation, explain
from zgraph.explain.timeline import Machine

__all__ = ["Explanation", "Machine", "explain"]
