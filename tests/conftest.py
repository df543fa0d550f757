"""Settings of every test run: no time limit for one example, because machines are busy and the limit says nothing."""

from hypothesis import settings

settings.register_profile("project", settings.get_profile("default"), deadline=None)
settings.load_profile("project")
