"""A Django project with tenants in schemas of PostgreSQL: its models, its app, its story."""
