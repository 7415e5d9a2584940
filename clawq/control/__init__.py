"""Celery: the app, the tasks, the worker's slots, the coordinator. The only package that imports celery."""
