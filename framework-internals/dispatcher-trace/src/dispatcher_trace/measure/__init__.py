"""What a run of the report measures: traced code, the catalogue of operators, costs and checks."""
