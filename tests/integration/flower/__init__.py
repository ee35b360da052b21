"""Flower over real workers, as a person sees it in a browser.

- `tasks`: the workers' app, whose bodies end as they are told
- `browser`: Chromium, driven by Selenium
- `stage`: both of them with Flower between, and what is to be seen on its pages

`python3 -m tests.integration.flower` makes the pictures of it in docs/pictures/.
"""
