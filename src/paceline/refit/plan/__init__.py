"""What should be done, decided from values alone: which versions to install, from whom to read."""

from paceline.refit.plan.install import (
    Costs,
    Holding,
    InstallPlan,
    Option,
    PlanKind,
    newest_sequence,
    plan_install,
)

__all__ = [
    "Costs",
    "Holding",
    "InstallPlan",
    "Option",
    "PlanKind",
    "newest_sequence",
    "plan_install",
]
