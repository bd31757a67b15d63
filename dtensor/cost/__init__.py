"""Cost of transfers and computations: profiles of links and devices, and estimated seconds by an alpha-beta model."""
