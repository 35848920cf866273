"""Reports for people: pictures, tables and traces of plans, profiles and runs."""
