"""What units cost, as far as iterations have told; kept up to date."""
