"""Collects episodes over one machine or a cluster, and stores them so that nothing is lost or collected twice."""
