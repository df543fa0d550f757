"""Campaigns in virtual time: the product's own decisions on servers that are made of recorded and published figures."""
