"""A process has one Django project: the tests in `inside` run in processes of their own."""

collect_ignore = ["inside"]
