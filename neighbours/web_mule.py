"""What a mule of uWSGI runs, beside the workers of the app: it takes the lock that they take."""

import os

import uwsgi

from neighbours.web_app import hold

for number in range(5):
    hold(f"mule-{os.getpid()}-{number}", 0.05)
while True:
    uwsgi.mule_get_msg()
