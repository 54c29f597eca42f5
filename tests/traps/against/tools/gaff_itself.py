"""gaff."""

import gaff
from traps.against.suite import Around


class Gaff(Around):
    distributions = ("gaff",)

    def values_during(self, model, sites, program):
        with gaff.capture(model, *sites) as got:
            program()
        return {site: got.all(site) for site in sites}

    gradients_during = values_during

    def changed_during(self, model, changes, program):
        addresses = {path.replace("[", ":output["): change for path, change in changes.items()}
        with gaff.edit(model, addresses):
            return program()

    def keeper(self, model, paths):
        again = gaff.capture(model, *paths)

        def run(x):
            with again:
                model(x)

        return run

    def ops(self, model, wanted, *args):
        sites = [f"/{name}#{number}" for name, number in wanted]
        with gaff.capture(model, *sites) as got:
            model(*args)
        return [got[site] for site in sites]
