"""Stands in for boost_core.plan.report until that is there."""

try:
    from boost_core.plan.report import Plan as Plan
    from boost_core.plan.report import PlannedShape as PlannedShape
    from boost_core.plan.report import PresetList as PresetList
except ImportError:
    from service.models.presets import PresetList as PresetList
    from service.models.provisional_plan import Plan as Plan
    from service.models.provisional_plan import PlannedShape as PlannedShape
