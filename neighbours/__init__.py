"""Other software beside the package, really run: brokers, backends, agents, web servers and more.

`python3 -m neighbours` runs each neighbour with real servers on loopback, in an environment of its
own, and writes what was seen as a row of `celery_redlock/operate/works_with.json`. Read `row.py`
first, then `brokers.py`, then `story.py`. Nothing of `tests` is imported here.

- `row.py`: `Neighbour`, `Seen`, `Row`: what is declared, what a run saw, and what is published.
- `run.py`: `Run`: runs a program of this folder in the environment of a neighbour.
- `environment.py`: the environments: exact requirements, and a wheel of this checkout.
- `servers.py`, `postgresql.py`, `proxies.py`: servers on loopback, which end with the run.
- `packages.py`: servers of other releases, which packages of PyPI, npm and Debian bring.
- `story_setup.py`: `Setup`: what the story is told: a broker, a backend, settings, an app.
- `story.py`: the story: 30 tasks on three keys over two workers, one of which is killed.
- `story_tasks.py`, `story_app.py`: the tasks of the story, and its app.
  A neighbour may have an app of its own.
- `watched_story.py`, `watched_app.py`: the story beside an agent, and what the agent recorded.
  `agent_reports.py`: how each agent begins and reports. `collector.py`: what it reports to.
- `crons_story.py`, `crons_app.py`: periodic tasks beside Sentry Crons, and its check-ins.
- `web_story.py`: requests to a web server, beside a worker. `web_app.py`, `web_mule.py`: what the
  server imports.
- `bodies.py`: what the bodies note, and what follows from it: overlaps, lost, run twice.
- `brokers.py`, `backends.py`, `schedulers.py`, `agents.py`, `task_classes.py`, `applications.py`,
  `web_servers.py`, `lock_nodes.py`: the neighbours, one file for each kind.
- `adopted/`: the settings of each application, and a plugin with the tasks of the story.
- `page.py`: writes the page that shows the rows.
- `own_servers.py`: the story on servers that the command line names.
- `controls.py`, `unlocked_app.py`, `refused_start.py`: runs that have to find a fault, such as
  tasks without a lock.
"""
