"""Rows shared out among the actors of a Ray cluster: one actor is one device with its populations.

`RayCluster` holds the actors, `RayPopulation` is a population whose rows live in them. What travels
is actions out and signals back, once per epoch; networks, data and lifecycle stay where the rows
are. Randomness belongs to rows, so what becomes of one does not depend on which actor has it. It
needs the extra: `pip install 'esper-grow[ray]'`.
"""

from esper.population.cluster.ray_cluster import ActorWork, ClusterError, RayCluster
from esper.population.cluster.ray_population import RayPopulation
from esper.population.population import Population

AnyPopulation = Population | RayPopulation
"""Rows in this process or in a cluster."""

__all__ = ["ActorWork", "AnyPopulation", "ClusterError", "RayCluster", "RayPopulation"]
