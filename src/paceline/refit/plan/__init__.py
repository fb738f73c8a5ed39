"""What should be done, decided from values alone: which versions to install, from whom to read."""

from paceline.refit.plan.install import Holding, InstallPlan, newest_sequence, plan_install

__all__ = ["Holding", "InstallPlan", "newest_sequence", "plan_install"]
