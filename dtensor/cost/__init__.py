"""What a transfer takes: profiles of links, and seconds by an alpha-beta model."""
